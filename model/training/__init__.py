"""Forecasts of backward passes: what is launched, how long it takes, what it waits for."""
