"""``python -m hybridengine.data``: see :mod:`hybridengine.data.prepare`."""

import sys

from hybridengine.data.prepare import main

if __name__ == "__main__":
    sys.exit(main())
