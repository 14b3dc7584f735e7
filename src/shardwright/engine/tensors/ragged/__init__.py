"""The sharded tensor of ragged layouts: each rank has a range of its elements, which may begin and end anywhere."""
