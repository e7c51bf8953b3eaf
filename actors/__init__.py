"""One process each: the actor base, the topology, the supervisor that launches it, and every actor."""
