"""Units of an SM that several simulators share: the queue of the tensor core, the instruction caches."""
