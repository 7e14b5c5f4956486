"""From records to figures. Nothing here acts: no clock, no file, no socket."""
