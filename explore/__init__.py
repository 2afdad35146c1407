"""What users do with forecasts at scale."""
