"""Find device mistakes on a laptop: simulated accelerator, host-sync guard, conformance kits. Layer 3."""
