"""The loop: bundles, engines, sessions, sampling, backends."""
