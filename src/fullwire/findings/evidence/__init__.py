"""Figures that speak for or against a verdict: each kind with its rule and its sentence."""
