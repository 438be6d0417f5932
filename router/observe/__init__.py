"""Observation of requests and workers: timelines, records, metrics, status."""
