from __future__ import annotations

import os
import signal
import threading
from datetime import datetime

import pytest

from headrace_bench.client import run as running
from headrace_bench.client.target import Target
