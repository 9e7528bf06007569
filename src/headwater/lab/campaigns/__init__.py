"""Campaigns: minutes of kills, forks, cleaners, attacks and mixed requests. Nothing wrong may come of it."""
