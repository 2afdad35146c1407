"""What needs a GPU: measure, calibrate, count, bundle."""
