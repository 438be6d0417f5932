"""What is told of requests and workers: timelines, records, metrics, status."""
