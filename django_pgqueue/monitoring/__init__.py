"""Numbers, metrics, traces and diagnosis of queues."""
