"""What a GPU is asked: are its kernels right, how fast are they; and, without one, what a compiler makes of them."""
