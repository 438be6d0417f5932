"""Views of a gateway and its cluster: metrics, paths and fields, and the snapshots of the live page."""
