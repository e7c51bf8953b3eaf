"""One process each: the actor base, the topology, its supervisor, and every actor."""
