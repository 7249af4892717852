"""Measures what users do not ask for: suites about internals, sweeps, typing, other peers.

Its own flags join `kvq_apps.settings.flags.FLAGS` when it is imported.
"""

from kvq_apps.settings import flags as _product
from kvq_lab.flags import FLAGS

_product.FLAGS.update(FLAGS)
