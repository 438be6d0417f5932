"""Views of a gateway and of the cluster behind it: metrics, paths and fields, and the snapshots of the live page."""
