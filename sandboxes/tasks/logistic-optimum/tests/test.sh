#!/bin/bash
# The same in every task: pytest as root in a fresh container, out of reach of /app; conftest.py writes the reward.
cd /tests || exit 1
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1
exec python3 -I -B -m pytest -q -p no:cacheprovider -c /dev/null --rootdir=/tests --confcutdir=/tests \
  --import-mode=importlib --tb=line /tests/test_outputs.py
