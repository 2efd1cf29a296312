"""Predictions: a run's typical step replayed under a scenario, and collectives in events."""
