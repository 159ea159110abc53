"""Step times of meshstep and of what a user would otherwise pick, side by side. See README.md."""
