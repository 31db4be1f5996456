"""Small honest example backends for Lowerdeck, and one that phones run."""

from lowerdeck.demo_backends.errors import DemoBackendError

__all__ = ["DemoBackendError"]
