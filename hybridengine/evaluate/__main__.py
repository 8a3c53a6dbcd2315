"""``python -m hybridengine.evaluate``: see measure.py."""

import sys

from hybridengine.evaluate.measure import main

if __name__ == "__main__":
    sys.exit(main())
