"""Views of a gateway and of the cluster behind it: metrics, and the snapshots of the live page."""
