"""Whether the other ranks are there, what they do, and how a rank that fails ends the job."""
