from muster._trace_plot import main

main()
