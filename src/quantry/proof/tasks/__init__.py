"""Tasks: questions with answers, asked of the 16-bit model and of the quantized one."""
