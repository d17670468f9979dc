use bonfire::*;
#[test]
fn smoke() {
    for alg in [None].into_iter().chain(Algorithm::ALL.map(Some)) {
        for n in 1..=5 {
            for len in [0usize, 1, 3, 5, 1000, 70000] {
                let mut b = Group::builder();
                if let Some(a) = alg {
                    b = b.algorithm(a);
                }
                let hs: Vec<_> = b
                    .threads(n)
                    .unwrap()
                    .into_iter()
                    .map(|g| {
                        std::thread::spawn(move || {
                            let mut v: Vec<f32> = (0..len).map(|i| (i + g.rank()) as f32).collect();
                            g.all_reduce(&mut v, ReduceOp::Sum).unwrap();
                            let w = g.start_all_reduce(vec![1i32; 4], ReduceOp::Sum).unwrap();
                            g.barrier().unwrap();
                            assert_eq!(w.wait().map_err(|e| e.0).unwrap(), vec![n as i32; 4]);
                            let want: Vec<f32> = (0..len).map(|i| (0..n).map(|r| (i + r) as f32).sum()).collect();
                            assert_eq!(v, want);
                        })
                    })
                    .collect();
                for h in hs {
                    h.join().unwrap();
                }
            }
        }
    }
}
