"""Many light workers in one process: real ones to router, etcd and NATS, on simulated engines."""
