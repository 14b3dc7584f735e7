"""Plans of a step's memory, without torch: programs, the caching allocator, devices, verdicts."""
