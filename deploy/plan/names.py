"""What a cluster's parts are called in Ray."""

CONTROLLER = "controller"


def namespace(cluster: str) -> str:
    """Of all actors of a cluster."""
    return f"baton-{cluster}"
