// Package shape is the arithmetic of resource requests: how many nodes, tasks and devices a request comes to, and how the
// tasks of a step lie on the nodes of an allocation.
//
// Invariants: the functions are pure; numbers are computed in 64 bits, so that no request overflows; a layout has exactly the
// tasks asked for, in rank order.
//
// fsm validates submissions and lays out steps with it; sched/control may use it to translate requests. It knows nothing of free
// resources, partitions or users.
package shape
