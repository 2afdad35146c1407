"""A stranger's bundle against the forecasts."""
