"""What `flashrt-ros bench` measures: in one run, alternating, medians with their spread."""
