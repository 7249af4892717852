"""What `kvq bench` measures with: shapes, engines on the same weights, one way to time them."""
