package main

import (
	"math"
	"math/rand/v2"
)

// model is a network of two layers: pixels → hidden (ReLU) → classes (softmax). Its parameters lie in one vector so
// that gradients travel, and checkpoints are written, in one piece.
type model struct {
	hidden int
	params []float32 // w1 [hidden][pixels], b1 [hidden], w2 [classes][hidden], b2 [classes]
	w1, b1 []float32 // views of params
	w2, b2 []float32
}

// paramCount is the number of parameters of a network with that many hidden units.
func paramCount(hidden int) int { return hidden*pixels + hidden + classes*hidden + classes }

// newModel makes a network with random weights (He initialisation), decided by the seed alone.
func newModel(hidden int, seed uint64) *model {
	m := &model{hidden: hidden, params: make([]float32, paramCount(hidden))}
	m.w1, m.b1, m.w2, m.b2 = views(m.params, hidden)
	random := rand.New(rand.NewPCG(seed, 0))
	for i := range m.w1 {
		m.w1[i] = float32(random.NormFloat64() * math.Sqrt(2.0/pixels))
	}
	for i := range m.w2 {
		m.w2[i] = float32(random.NormFloat64() * math.Sqrt(2.0/float64(hidden)))
	}
	return m
}

// views cuts a parameter or gradient vector into its tensors.
func views(v []float32, hidden int) (w1, b1, w2, b2 []float32) {
	w1, v = v[:hidden*pixels], v[hidden*pixels:]
	b1, v = v[:hidden], v[hidden:]
	w2, b2 = v[:classes*hidden], v[classes*hidden:]
	return w1, b1, w2, b2
}

// forward computes the hidden activations and the probabilities of the classes.
func (m *model) forward(image *[pixels]float32, hidden, probabilities []float32) {
	for h := range hidden {
		sum := m.b1[h]
		for p, w := range m.w1[h*pixels : (h+1)*pixels] {
			sum += w * image[p]
		}
		hidden[h] = max(sum, 0)
	}
	highest := float32(math.Inf(-1))
	for c := range probabilities {
		sum := m.b2[c]
		for h, w := range m.w2[c*m.hidden : (c+1)*m.hidden] {
			sum += w * hidden[h]
		}
		probabilities[c] = sum
		highest = max(highest, sum)
	}
	var total float32
	for c, score := range probabilities {
		probabilities[c] = float32(math.Exp(float64(score - highest)))
		total += probabilities[c]
	}
	for c := range probabilities {
		probabilities[c] /= total
	}
}

// gradient adds the gradient of the cross entropy of the samples to grad, and returns the sum of their losses in nats.
func (m *model) gradient(samples []sample, indices []int, grad []float32) float32 {
	gw1, gb1, gw2, gb2 := views(grad, m.hidden)
	hidden, probabilities := make([]float32, m.hidden), make([]float32, classes)
	back := make([]float32, m.hidden)
	var loss float32
	for _, i := range indices {
		s := &samples[i]
		m.forward(&s.image, hidden, probabilities)
		loss -= float32(math.Log(math.Max(float64(probabilities[s.label]), 1e-12)))
		probabilities[s.label]--
		clear(back)
		for c, d := range probabilities {
			gb2[c] += d
			row, grow := m.w2[c*m.hidden:(c+1)*m.hidden], gw2[c*m.hidden:(c+1)*m.hidden]
			for h, a := range hidden {
				grow[h] += d * a
				back[h] += d * row[h]
			}
		}
		for h, d := range back {
			if hidden[h] <= 0 {
				continue
			}
			gb1[h] += d
			grow := gw1[h*pixels : (h+1)*pixels]
			for p, x := range s.image {
				grow[p] += d * x
			}
		}
	}
	return loss
}

// accuracy is the share of samples whose most probable class is the right one.
func (m *model) accuracy(samples []sample) float64 {
	hidden, probabilities := make([]float32, m.hidden), make([]float32, classes)
	right := 0
	for i := range samples {
		m.forward(&samples[i].image, hidden, probabilities)
		best := 0
		for c, p := range probabilities {
			if p > probabilities[best] {
				best = c
			}
		}
		if best == samples[i].label {
			right++
		}
	}
	return float64(right) / float64(len(samples))
}

// descend makes one step of gradient descent with momentum. grad is the mean over the batch.
func (m *model) descend(grad, velocity []float32, rate, momentum float32) {
	for i, g := range grad {
		velocity[i] = momentum*velocity[i] + g
		m.params[i] -= rate * velocity[i]
	}
}
