package dev

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
)

// Ports come from below the range from which the kernel gives ports to outgoing connections (32768 upwards), so that a
// process that is down does not lose its port to one of them.
const (
	lowestPort  = 20000
	highestPort = 32000
)

// freeAddresses finds loopback addresses on which nobody listens.
func freeAddresses(count int) ([]string, error) {
	if count > (highestPort-lowestPort)/2 {
		return nil, fmt.Errorf("%d ports are needed; a local cluster may use %d", count, (highestPort-lowestPort)/2)
	}
	var found []string
	var last error
	first := rand.IntN(highestPort - lowestPort)
	for i := range highestPort - lowestPort {
		if len(found) == count {
			return found, nil
		}
		port := lowestPort + (first+i)%(highestPort-lowestPort)
		address := net.JoinHostPort("127.0.0.1", strconv.Itoa(port))
		listener, err := net.Listen("tcp", address)
		if err != nil {
			last = err
			continue
		}
		if err := listener.Close(); err != nil {
			last = err
			continue
		}
		found = append(found, address)
	}
	return nil, errors.Join(fmt.Errorf("only %d of %d ports between %d and %d are free", len(found), count, lowestPort, highestPort), last)
}
