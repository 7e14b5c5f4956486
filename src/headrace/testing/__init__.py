"""What tests of Headrace, and of engines for it, are made of: doubles, and kits that an engine must pass."""

from headrace.testing.doubles import CHATML as CHATML
from headrace.testing.doubles import CONTROL as CONTROL
from headrace.testing.doubles import END as END
from headrace.testing.doubles import ManualClock as ManualClock
from headrace.testing.doubles import RecordingSend as RecordingSend
from headrace.testing.doubles import Script as Script
from headrace.testing.doubles import ScriptedEngine as ScriptedEngine
from headrace.testing.doubles import ScriptedTokenizer as ScriptedTokenizer
from headrace.testing.doubles import counting_tokenizer as counting_tokenizer
from headrace.testing.doubles import counting_worker as counting_worker
from headrace.testing.doubles import scripted_worker as scripted_worker
from headrace.testing.kits import check_step_engine as check_step_engine
from headrace.testing.kits import check_stream_engine as check_stream_engine
from headrace.testing.kits import collect as collect
