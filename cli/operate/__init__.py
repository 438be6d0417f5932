"""Commands that change a cluster that runs: its pools, and the blocks in its tiers."""
