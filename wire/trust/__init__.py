"""Proofs between processes and callers: identities of processes, keys of tenants, certificates of ports. No sockets."""
