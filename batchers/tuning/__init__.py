"""Which number of workers, environments and steps is fastest: the search, its measurements, a model of the roles."""
