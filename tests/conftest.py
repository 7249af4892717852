"""Settings every test shares; read before numpy loads."""

import os

# The arrays are small and the machine is shared: more threads only spin.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
