"""What registers hold: element types as hardware rounds them, layouts over threads, tensors."""
