"""From captured packets to flows, iterations, the pattern of the traffic and its audit."""
