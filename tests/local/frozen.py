"""Imported last by the process that others are forked from: what it has imported is garbage to nobody.

Else every forked process looks through all of it, and gets a copy of its own of every page for that.
"""

import atexit
import gc

gc.freeze()
# At its own end it is an ordinary process again, that takes down what it has.
atexit.register(gc.unfreeze)
