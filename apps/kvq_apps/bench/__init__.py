"""The parts of `kvq bench`: model shapes, engines on the same weights, one way to time them."""
