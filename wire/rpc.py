"""What every gRPC server and channel of ours is opened with, and the name of the cluster's token."""

TOKEN_METADATA = "baton-cluster-token"
MAX_MESSAGE_BYTES = 4 << 20
MAX_METADATA_BYTES = 16 << 10
KEEPALIVE_EVERY_MS = 10_000
MAX_PING_MS = 5_000
"""How long the other side may take to answer a ping."""
MIN_PING_INTERVAL_MS = 5_000
MAX_HANDSHAKE_MS = 10_000
"""How long a connection may take until HTTP/2 begins."""
MAX_IDLE_MS = 600_000
"""How long a connection may have no call open."""
CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", KEEPALIVE_EVERY_MS),
    ("grpc.keepalive_timeout_ms", MAX_PING_MS),
    ("grpc.http2.ping_timeout_ms", MAX_PING_MS),  # else 60 s, where gRPC waits for a ping of its own just then
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
SERVER_OPTIONS = (
    *CHANNEL_OPTIONS,
    ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_MS),
    # gRPC takes what is below the first, refuses what is over the second, and between the two leaves it to chance.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.server_handshake_timeout_ms", MAX_HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", MAX_IDLE_MS),
    ("grpc.so_reuseport", 0),
)
