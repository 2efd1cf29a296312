"""Answers to the questions of people, each of which uses several packages."""
