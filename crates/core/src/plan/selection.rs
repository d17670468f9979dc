//! Selection tables, which users read and write: which path carries an operation, by its size.
//!
//! # Ranks with different tables
//!
//! Ranks that ran different plans would wait for each other. At the rendezvous each rank therefore sends rank 0 its
//! table as text, and a table other than rank 0's fails the rendezvous for all ranks. On a custom transport nothing
//! compares tables: a rank gets a message of another length, or the deadline passes.
//!
//! With a table of engine and plans, ranks that disagree about the *count* may take different paths. Over TCP and in
//! shared memory the control plane detects this like any other mismatch. Threads and MPI, whose engines compare calls,
//! do so before a plan too.

use std::fmt;
use std::str::FromStr;

use super::by_size::BySize;
use super::{Algorithm, table};
use crate::types::{Call, Error, Operation};

/// Selects the algorithm of an operation by the size of its whole in bytes (as [`Call::bytes`] and `bonfire perf` count
/// it).
///
/// The text form, also used by `BONFIRE_ALGORITHMS`, lists paths with the sizes that they are for, from 0 on without
/// gaps; both ends of a range belong to it. A path is an [`Algorithm`], or `native`: the transport's own
/// implementation, in memory that threads, or processes of one host, share. If a transport has none, `native` is the
/// default plan.
///
/// ```
/// # use bonfire_core::Selection;
/// // For all operations. One that lacks an algorithm takes the nearest that it has.
/// let all: Selection = "direct:0-65536;ring:65537-".parse()?;
/// // For some operations, which must have the algorithms. The others keep the default.
/// let some: Selection = "all_reduce=native:0-65535;ring:65536-,broadcast=tree:0-".parse()?;
/// assert_eq!(some.to_string(), "all_reduce=native:0-65535;ring:65536-,broadcast=tree:0-");
/// # Ok::<(), bonfire_core::Error>(())
/// ```
///
/// Both forms combine: first the table for all operations, then the exceptions. `default` stands for the default of
/// every operation, as [`Selection::default`] does: `native` if the transport has it, otherwise plans by world size and
/// size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selection {
    /// For operations that are not in `named`.
    common: Option<Table>,
    /// In the order of operations, each at most once.
    named: Vec<(Operation, Table)>,
}

/// What runs the operations of some sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Path {
    /// The transport's engine.
    Native,
    Plan(Algorithm),
}

type Table = BySize<Path>;

impl Selection {
    /// Returns the algorithm for `call`, or none if it is left to the engine.
    pub(crate) fn plan(&self, call: &Call, world_size: usize, engine: bool) -> Option<Algorithm> {
        if call.operation == Operation::AllToAllV {
            // No engine runs this operation: only the two ranks of a pair know the sizes between them.
            return Some(Algorithm::Direct);
        }
        match self.path(call.operation, call.bytes(), world_size, engine) {
            Path::Native => None,
            Path::Plan(algorithm) => Some(algorithm),
        }
    }

    fn path(&self, operation: Operation, bytes: usize, world_size: usize, engine: bool) -> Path {
        let chosen = match (self.named.iter().find(|(of, _)| *of == operation), &self.common) {
            (Some((_, table)), _) => table.at(bytes),
            (None, Some(table)) => match table.at(bytes) {
                Path::Plan(algorithm) => Path::Plan(algorithm.nearest(operation)),
                Path::Native => Path::Native,
            },
            (None, None) => Path::Native,
        };
        match chosen {
            Path::Native if !engine => Path::Plan(table::plan(operation, bytes, world_size)),
            chosen => chosen,
        }
    }

    /// Whether any operation of any size is left to an engine. If none is, a group creates no shared memory.
    #[cfg(unix)]
    pub(crate) fn is_native_anywhere(&self) -> bool {
        let in_table = |table: &Table| table.paths().any(|path| path == Path::Native);
        let unnamed = SELECTABLE.iter().any(|operation| self.named.iter().all(|(other, _)| other != operation));
        self.named.iter().any(|(_, table)| in_table(table)) || (unnamed && self.common.as_ref().is_none_or(in_table))
    }

    /// Returns the table in effect for one operation, defaults included.
    pub(crate) fn in_effect(&self, operation: Operation, world_size: usize, engine: bool) -> Selection {
        if !SELECTABLE.contains(&operation) {
            return Selection::default();
        }
        let tables = self.named.iter().map(|(_, table)| table).chain(&self.common);
        let defaults = table::plans(operation, world_size).iter().map(|(_, from)| *from);
        let mut edges: Vec<usize> = tables.flat_map(|table| &table.0).map(|(_, from)| *from).chain(defaults).collect();
        edges.sort_unstable();
        let mut table: Vec<(Path, usize)> = Vec::new();
        for from in edges {
            let path = self.path(operation, from, world_size, engine);
            if table.last().is_none_or(|(last, _)| *last != path) {
                table.push((path, from));
            }
        }
        Selection { common: None, named: vec![(operation, BySize(table))] }
    }
}

/// Selects one algorithm for every operation and size. An operation that lacks it takes the nearest one that it has.
impl From<Algorithm> for Selection {
    fn from(algorithm: Algorithm) -> Self {
        Selection { common: Some(BySize::all(Path::Plan(algorithm))), named: Vec::new() }
    }
}

/// The operations that a table may name. Messages between two ranks, and all_to_all_v, have one path only.
pub(super) const SELECTABLE: [Operation; 9] = [
    Operation::AllReduce,
    Operation::Reduce,
    Operation::Broadcast,
    Operation::AllGather,
    Operation::ReduceScatter,
    Operation::Barrier,
    Operation::AllToAll,
    Operation::Gather,
    Operation::Scatter,
];

impl fmt::Display for Path {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Path::Native => f.write_str("native"),
            Path::Plan(algorithm) => write!(f, "{algorithm}"),
        }
    }
}

/// The text form that [`Selection`] describes. Parsing it returns an equal selection.
impl fmt::Display for Selection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Selection::default() {
            return f.write_str(DEFAULT);
        }
        if let Some(common) = &self.common {
            write!(f, "{common}")?;
        }
        for (i, (operation, table)) in self.named.iter().enumerate() {
            let separator = if i == 0 && self.common.is_none() { "" } else { "," };
            write!(f, "{separator}{operation}={table}")?;
        }
        Ok(())
    }
}

const DEFAULT: &str = "default";

impl FromStr for Selection {
    type Err = Error;

    /// # Errors
    /// [`Error::Config`] for sizes without a path or with two, unknown names, and algorithms that an operation lacks.
    fn from_str(text: &str) -> Result<Self, Error> {
        parse(text).map_err(|reason| Error::Config(format!("the algorithms '{text}': {reason}")))
    }
}

/// Parses a selection, or returns what is wrong with the text.
pub(crate) fn parse(text: &str) -> Result<Selection, String> {
    let mut selection = Selection::default();
    if text == DEFAULT {
        return Ok(selection);
    }
    for (i, item) in text.split(',').enumerate() {
        let Some((name, ranges)) = item.split_once('=') else {
            if i > 0 {
                return Err(format!("'{item}' names no operation: write operation={item}, or put it first"));
            }
            selection.common = Some(parse_table(item)?);
            continue;
        };
        let operation = SELECTABLE.into_iter().find(|operation| operation.to_string() == name);
        let operation =
            operation.ok_or_else(|| format!("'{name}' is not an operation: give one of {}", list(&SELECTABLE)))?;
        let table = parse_table(ranges)?;
        for path in table.paths() {
            if let Path::Plan(algorithm) = path
                && !algorithm.supports(operation)
            {
                let valid: Vec<_> = Algorithm::ALL.iter().copied().filter(|other| other.supports(operation)).collect();
                return Err(format!("{operation} has no {algorithm}: give native or one of {}", list(&valid)));
            }
        }
        if selection.named.iter().any(|(other, _)| *other == operation) {
            return Err(format!("{operation} is listed twice: give all its sizes in one table"));
        }
        selection.named.push((operation, table));
    }
    selection.named.sort_by_key(|(operation, _)| *operation as u8);
    Ok(selection)
}

fn parse_table(ranges: &str) -> Result<Table, String> {
    let paths = || Algorithm::ALL.iter().copied().map(Path::Plan).chain([Path::Native]);
    BySize::parse(ranges, "ring", |name| {
        let path = paths().find(|path| path.to_string() == name);
        path.ok_or_else(|| format!("'{name}' is not a path: give one of {}", list(&paths().collect::<Vec<_>>())))
    })
}

fn list(all: &[impl ToString]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
}

#[cfg(all(test, not(bonfire_loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn round_trips(text: &str) {
        assert_eq!(text.parse::<Selection>().unwrap().to_string(), text);
    }

    fn path(text: &str, operation: Operation, bytes: usize, engine: bool) -> String {
        text.parse::<Selection>().unwrap().path(operation, bytes, 4, engine).to_string()
    }

    #[test]
    fn tables_round_trip_through_text() {
        round_trips("default");
        round_trips("direct:0-65536;ring:65537-");
        round_trips("native:0-");
        round_trips("all_reduce=doubling:0-16384;ring:16385-,broadcast=tree:0-");
        round_trips("ring:0-,all_reduce=doubling:0-0;halving:1-1;ring:2-,barrier=native:0-,all_to_all=direct:0-");
        let sorted = "all_to_all=direct:0-,reduce=tree:0-".parse::<Selection>().unwrap().to_string();
        assert_eq!(sorted, "reduce=tree:0-,all_to_all=direct:0-");
        for algorithm in Algorithm::ALL.iter().copied() {
            assert_eq!(Selection::from(algorithm), format!("{algorithm}:0-").parse().unwrap());
        }
    }

    #[test]
    fn ranges_select_paths_exactly_at_their_bounds() {
        use Operation::{AllReduce, AllToAll, Barrier, Broadcast};
        let text = "doubling:0-99;ring:100-,all_reduce=native:0-9;tree:10-99;direct:100-";
        for (bytes, want) in [(0, "native"), (9, "native"), (10, "tree"), (99, "tree"), (100, "direct")] {
            assert_eq!(path(text, AllReduce, bytes, true), want, "{bytes}");
        }
        assert_eq!(path(text, AllReduce, usize::MAX, true), "direct");
        // Operations without a table of their own take the nearest algorithm that they have.
        assert_eq!(path(text, Broadcast, 99, true), "halving");
        assert_eq!(path(text, Broadcast, 100, true), "ring");
        assert_eq!(path(text, AllToAll, 99, true), "direct");
        assert_eq!(path(text, Barrier, 0, true), "direct");
        // By default the engine runs everything; without an engine, plans do.
        assert_eq!(path("broadcast=tree:0-", AllReduce, 7, true), "native");
        assert_eq!(path("broadcast=tree:0-", AllReduce, 7, false), path("default", AllReduce, 7, false));
        assert_eq!(path("native:0-", AllReduce, 7, false), path("default", AllReduce, 7, false));
    }

    #[test]
    fn the_table_in_effect_selects_the_same_at_every_size() {
        for text in ["default", "native:0-99;ring:100-", "all_reduce=ring:0-5;native:6-20000;tree:20001-"] {
            let selection = text.parse::<Selection>().unwrap();
            for (operation, world_size, engine) in
                SELECTABLE.into_iter().flat_map(|op| [(op, 2, false), (op, 4, false), (op, 4, true)])
            {
                let effect = selection.in_effect(operation, world_size, engine);
                // It contains no default any more, and selects the same.
                for bytes in (0..23).map(|shift| 1usize << shift).chain([0, 5, 6, 99, 100, 20_000, 20_001]) {
                    let at = |selection: &Selection| selection.path(operation, bytes, world_size, engine);
                    assert_eq!(at(&effect), at(&selection), "{text}, {operation} at {bytes}: {effect}");
                }
                assert_eq!(effect.to_string().parse(), Ok(effect), "{text}");
            }
        }
    }

    #[cfg(unix)]
    #[test]
    fn an_engine_is_needed_if_any_table_selects_native() {
        let native = |text: &str| text.parse::<Selection>().unwrap().is_native_anywhere();
        assert!(native("default") && native("native:0-") && native("all_reduce=ring:0-"));
        assert!(native("ring:0-,broadcast=tree:0-5;native:6-"));
        assert!(!native("ring:0-") && !native("ring:0-,broadcast=tree:0-"));
        let all: Vec<_> = SELECTABLE.iter().map(|operation| format!("{operation}=direct:0-")).collect();
        assert!(!native(&all.join(",")) && native(&all[1..].join(",")));
        assert!(!native(&format!("native:0-,{}", all.join(","))));
    }

    #[test]
    fn invalid_tables_are_rejected_with_a_remedy() {
        for (text, reason) in [
            ("", "form path:from-to"),
            ("ring", "form path:from-to"),
            ("ring:0", "form path:from-to"),
            ("ring:a-", "form path:from-to"),
            ("ring:+0-", "form path:from-to"),
            ("ring:-", "form path:from-to"),
            ("ring:0-18446744073709551616", "form path:from-to"),
            ("ring:0-18446744073709551615;tree:0-", "form path:from-to"),
            ("Ring:0-", "'Ring' is not a path: give one of direct, ring, halving, doubling, tree, native"),
            ("ring:1-", "no path for sizes from 0 to 0"),
            ("ring:0-9;tree:11-", "no path for sizes from 10 to 10"),
            ("ring:0-9;tree:9-", "two paths for size 9: let 'tree:9-' begin with 10"),
            ("ring:0-9", "no path for sizes from 10 on"),
            ("ring:0-;tree:5-", "after a range without an end"),
            ("ring:0-9;tree:10-9;direct:10-", "ends before it begins"),
            ("ring:0-;", "form path:from-to"),
            ("ring:0-,", "names no operation"),
            ("ring:0-,tree:0-", "names no operation"),
            ("all_reduce=ring:0-,tree:0-", "names no operation"),
            ("send=direct:0-", "'send' is not an operation: give one of all_reduce, reduce"),
            ("all_reduce =ring:0-", "is not an operation"),
            ("broadcast=doubling:0-", "broadcast has no doubling: give native or one of direct, ring, halving, tree"),
            ("all_to_all=ring:0-", "all_to_all has no ring: give native or one of direct"),
            ("reduce=ring:0-,reduce=tree:0-", "reduce is listed twice"),
        ] {
            let error = text.parse::<Selection>().unwrap_err();
            let words = matches!(&error, Error::Config(words) if words.contains(text) && words.contains(reason));
            assert!(words, "'{text}': {error}");
        }
    }

    #[test]
    fn fuzz_tables() {
        let texts = [
            "default",
            "native:0-",
            "direct:0-65536;ring:65537-",
            "all_reduce=doubling:0-16384;ring:16385-,broadcast=tree:0-",
            "ring:0-,all_reduce=doubling:0-0;halving:1-1;ring:2-,barrier=native:0-,all_to_all=direct:0-",
        ];
        bonfire_testing::fuzz::fuzz("table", texts.map(|text| text.as_bytes().to_vec()), |bytes| {
            let Ok(text) = str::from_utf8(bytes) else { return false };
            let Ok(selection) = text.parse::<Selection>() else { return false };
            assert_eq!(selection.to_string().parse(), Ok(selection.clone()));
            for item in text.split(',').filter(|_| text != DEFAULT) {
                let sizes = item.split(';').map(|range| range.rsplit_once(':').unwrap().1.split_once('-').unwrap());
                let end = sizes.fold("0".to_owned(), |next, (from, to)| {
                    assert_eq!(from.parse(), next.parse::<u128>(), "a gap or an overlap in {text}");
                    to.parse::<u128>().map_or(String::new(), |to| (to + 1).to_string())
                });
                assert_eq!(end, "", "{text} has no path for large sizes");
            }
            for operation in SELECTABLE {
                let effect = selection.in_effect(operation, 4, true);
                assert_eq!(effect.to_string().parse(), Ok(effect));
            }
            true
        });
    }

    proptest! {
        #[test]
        fn every_parsed_table_round_trips(text in "[a-z_=:;,0-9-]{0,40}") {
            if let Ok(selection) = text.parse::<Selection>() {
                prop_assert_eq!(selection.to_string().parse(), Ok(selection));
            }
        }
    }
}
