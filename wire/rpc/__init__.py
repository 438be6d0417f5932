"""gRPC of Baton: options of its servers and channels, the proof of the cluster's token, errors as statuses."""
