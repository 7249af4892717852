"""What every stored form and every kernel means, in numpy."""
