"""The loop: bundles, engines, sessions, sampling, backends. Knows no checkpoint and no terminal."""
