"""``python -m hybridengine.doctor``: see hybridengine/tools/doctor.py."""

import sys

from hybridengine.tools.doctor import main

if __name__ == "__main__":
    sys.exit(main())
