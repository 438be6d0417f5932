"""The controller: pools, the fleet of workers, the singletons."""
